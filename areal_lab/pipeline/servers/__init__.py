"""The run's inference servers: started or attached, watched, restarted."""
