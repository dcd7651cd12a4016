"""Operations as autograd runs them, the templates that follow, and their placement on a step."""
