"""What the tests share: shapes, layouts, sharding, numerics."""
