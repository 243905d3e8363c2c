"""The asyncio shell that performs what `areal_lab.control` decides."""
