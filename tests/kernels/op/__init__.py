"""The op protocol: transformations, types, shardings."""
