// Package nftables is the proxy's dialect for nftables: one constant set of rules in which Services
// are data.
//
// Every frontend and backend is an element of a set or map, never a chain or a rule, so that a
// change costs what has changed and a packet costs the same number of lookups whatever the number
// of Services. No element carries a verdict that names a chain, as adding one makes the kernel
// check the whole table for loops. docs/design/nftables.md has a picture.
//
// The kernel is spoken to over netlink. What it holds is read once at the start and after somebody
// else touched our tables; in between, what it confirmed is known, and only elements that differ
// are sent.
package nftables
