// Package iptables is the proxy's dialect for iptables: chains that an operator of kube-proxy
// knows, with the prefix LF-.
//
// What the chains shall hold is rendered as text in the very form in which iptables-save prints it,
// so that the kernel's rules are compared with it line by line, and only lines that differ are
// written.
package iptables
