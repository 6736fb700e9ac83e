"""GVP: "Bridging Autoregressive and Masked Modeling"."""
