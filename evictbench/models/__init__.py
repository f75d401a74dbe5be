"""Loading models and policy weights, and what is known of the machine."""
