"""The page at `/` in a real browser, against a stack of real processes. Needs Debian's chromium."""
