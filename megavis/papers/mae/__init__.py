"""MAE: "Masked Autoencoders Are Scalable Vision Learners"."""
