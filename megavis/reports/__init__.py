"""One self-contained web page about one or several runs."""
