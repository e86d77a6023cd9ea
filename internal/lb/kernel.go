package lb

import "fmt"

// NftablesSince is the first release of Linux whose nftables have all that the proxy's rules need; kube-proxy asks for
// the same. Older ones may take the rules and then not do what they say, so mode auto does not try.
const NftablesSince = "5.13"

// BeforeNftables reports whether a release of Linux, as uname -r prints it, is before NftablesSince, by its first two
// numbers. What cannot be read is not.
func BeforeNftables(release string) bool { return isBefore(release, NftablesSince) }

// OffloadUDPSince is the first Linux that deletes a flow from conntrack while it is in a flowtable. Before, a client
// that keeps its port reached a backend that is gone for as long as it sent.
const OffloadUDPSince = "6.4"

// KeepsOffloaded reports whether a release of Linux is before OffloadUDPSince.
func KeepsOffloaded(release string) bool { return isBefore(release, OffloadUDPSince) }

func isBefore(release, since string) bool {
	var major, minor, wantMajor, wantMinor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 {
		return false
	}
	_, _ = fmt.Sscanf(since, "%d.%d", &wantMajor, &wantMinor)
	return major < wantMajor || major == wantMajor && minor < wantMinor
}
