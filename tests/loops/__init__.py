"""Train loops as tutorials of libraries write them, twenty steps against float64."""
