"""Commands of `inpaint-bench`, one module per verb."""
