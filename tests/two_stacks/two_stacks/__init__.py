"""iGPT in two stacks, for tests."""
