"""Save, load and convert the state of a model in any layout."""
