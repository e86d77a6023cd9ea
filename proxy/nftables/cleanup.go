package nftables

import "github.com/landfall-lb/landfall/proxy/nft"

// Cleanup removes our tables of both families, and nothing else. Another proxy on the node, which
// serves the same Services, loses no connection by it.
func Cleanup(n *Netlink) error { return nft.Remove(n.commands, TableName) }
