"""Checks of arguments: of single ones, of shapes and arrays, of tensors."""
