"""Mixed traffic of many requests on one engine, whose answers and sizes are checked."""
