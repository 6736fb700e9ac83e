"""Compare two checkouts side by side: does a redesign compute what the old tree computed?

`__main__.py` runs both, `cases.py` says on what, `record.py` measures inside one checkout,
`adapter.py` holds all that reaches into it, and `report.py` compares.
"""
