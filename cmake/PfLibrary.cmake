# The library and the command are put together here once all modules that belong to them exist.
