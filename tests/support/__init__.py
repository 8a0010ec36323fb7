"""Code that tests share: shapes, layouts, sharding, numerics."""
