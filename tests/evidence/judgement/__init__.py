"""What is judged: errors of train steps that rounding explains or does not, and times taken on a busy machine."""
