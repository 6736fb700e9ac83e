"""What may be typed: the options of all commands, read before anything heavy is imported."""
