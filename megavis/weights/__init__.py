"""Released weights and folders of the Hub, in and out: tables of names, and one engine for them."""
