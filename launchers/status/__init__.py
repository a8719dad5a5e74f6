"""How a sweep stands: three witnesses held against each other, and what a person is shown of it."""
