"""Plants small defects in the code and checks whether the tests of `nox -s tests` catch them.

cosmic-ray creates the defects. This package chooses them, plants each in a copy of the repository,
runs the tests that reach its line, and prints a table. `nox -s mutation` runs it.
"""
