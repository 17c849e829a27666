"""A plugin's module that is a script as well, and ends whoever imports it."""

raise SystemExit(2)
