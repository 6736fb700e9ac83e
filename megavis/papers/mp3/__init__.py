"""MP3: "Position Prediction as an Effective Pretraining Strategy"."""
