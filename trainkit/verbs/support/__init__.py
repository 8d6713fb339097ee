"""Code shared by several verbs."""
