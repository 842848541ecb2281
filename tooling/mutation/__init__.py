"""Plant small defects in the code and see whether the tests of `nox -s tests` notice them.

cosmic-ray makes the defects; what is here chooses them, plants each in a copy of the repository,
runs the test files that reach its line, and prints a table. `nox -s mutation` runs it.
"""
