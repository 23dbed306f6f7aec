"""What a run may use, will use and has used. Pure decisions: costs and a budget in, a Plan out."""
