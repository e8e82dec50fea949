"""Known defects, one test each: these fail today and are not collected by ``make test``.

Run one file with ``python -m pytest tests/open_cases/gradients.py``. A test moves to the tests of its package together
with the change that makes it pass.
"""
