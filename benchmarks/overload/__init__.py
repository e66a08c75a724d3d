"""A live application under more load than its engines carry, with and without admission by predicted wait."""
