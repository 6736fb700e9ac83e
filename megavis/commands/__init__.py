"""The `megavis` commands, by name or by subject.

A command is a function of the parsed arguments that returns the exit code. It raises `UserError`
for a user's mistake: a run, its data or a file that cannot be opened, or that do not fit together.
"""
