"""Tables, figures and pages drawn from run directories."""
