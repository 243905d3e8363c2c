"""Install inference engines and start their servers."""
