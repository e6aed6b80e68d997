"""What users ask for, and the form in which the library takes it."""
