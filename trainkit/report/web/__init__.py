"""The pages that a person opens in a browser: one HTML file each, without network access."""
