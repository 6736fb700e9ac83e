"""What each `megavis` command does."""
