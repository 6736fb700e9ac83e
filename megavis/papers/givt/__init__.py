"""GIVT: "GIVT: Generative Infinite-Vocabulary Transformers", and its variants."""
