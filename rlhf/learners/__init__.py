"""DeepSpeed learners."""
