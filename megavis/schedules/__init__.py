"""What is known when: the order of an image's tokens, and what is predicted from what."""
