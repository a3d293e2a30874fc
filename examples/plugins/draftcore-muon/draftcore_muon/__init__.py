"""The optimizer Muon for the drafts of draftcore."""
