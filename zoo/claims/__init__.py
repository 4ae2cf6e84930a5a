"""The claims that this project is built on, as data; what tries them, judges them and reports."""
