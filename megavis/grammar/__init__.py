"""The words of a paper as data, their sum, and one check. No torch."""
