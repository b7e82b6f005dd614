"""Read the BMC of each host from the control node, by Redfish or IPMI."""
