"""Compare two checkouts: check that a redesign computes the same as the old tree.

`__main__.py` runs both, `cases.py` lists the cases, `record.py` measures inside one checkout,
`adapter.py` has all code that depends on a checkout's internals, and `report.py` compares.
"""
