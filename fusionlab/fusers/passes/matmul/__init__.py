"""Passes `gated_matmul`: gated pairs `act(x @ w) * (x @ v)`, and `matmul_schedule`: every other matrix product, with the route it takes.

Read `matmul_schedule` first, then `products` (a product with what surrounds it), `gated` and `gates` (pairs), and `route_table`.
"""
