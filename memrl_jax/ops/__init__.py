"""Pure, jit-able functions of arrays: one family of equations a file, one equation a function."""
