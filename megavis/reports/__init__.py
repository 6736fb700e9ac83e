"""A run, or several, as one web page that needs nothing but itself."""
