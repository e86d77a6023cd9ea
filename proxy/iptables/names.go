package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// prefix marks a chain as ours.
const prefix = "LF-"

// The chains that exist once.
const (
	chainServices     = prefix + "SERVICES"
	chainExternalIPs  = chainServices + "-EXT" // its jumps sort behind those to chainServices + "-7F"
	chainExternal     = prefix + "EXTERNAL-SERVICES"
	chainNodePorts    = prefix + "NODEPORTS"
	chainFirewall     = prefix + "PROXY-FIREWALL"
	chainMartians     = prefix + "FIREWALL"
	chainForward      = prefix + "FORWARD"
	chainEcho         = prefix + "ECHO" // addresses that answer ping
	chainClusterIPs   = prefix + "CLUSTER-IPS"
	chainVIPs         = prefix + "VIPS"
	chainRelay        = prefix + "RELAY" // to the node's relay
	chainRefuse       = prefix + "REFUSE"
	chainMasquerade   = prefix + "MARK-MASQ"
	chainPostrouting  = prefix + "POSTROUTING"
	prefixCluster     = prefix + "SVC-" // the endpoints of policy Cluster
	prefixLocal       = prefix + "SVL-" // the endpoints of policy Local
	prefixExternal    = prefix + "EXT-" // what comes to anything but the cluster IP
	prefixSourceRange = prefix + "FW-"  // who may connect to a VIP
	prefixSources     = prefix + "SRC-" // the source ranges of a Service
	prefixEndpoint    = prefix + "SEP-"
	prefixClients     = prefix + "CLIENTS-" // a list of the match recent: see memory
)

// ofOne reports whether a chain is a single Service's.
func ofOne(chain string) bool {
	for _, own := range []string{
		prefixCluster, prefixLocal, prefixExternal, prefixSourceRange, prefixSources, prefixEndpoint,
	} {
		if strings.HasPrefix(chain, own) {
			return true
		}
	}
	return false
}

// portName names a Service port as rules' comments do. The colon stays when the port has no name.
func portName(key lb.Key, name string) string { return key.String() + ":" + name }

// suffix is the end of the names of a port's chains.
func suffix(key lb.Key, p plan.Port) string { return hash(portID(key, p)) }

func portID(key lb.Key, p plan.Port) string { return portName(key, p.Name) + p.Protocol.Lower() }

// endpointChain names the chain of one endpoint of a port.
func endpointChain(key lb.Key, p plan.Port, endpoint netip.AddrPort) string {
	return prefixEndpoint + hash(portID(key, p)+endpoint.String())
}

// hash shortens s as kube-proxy does, so that operators find the suffixes that they know.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return base32.StdEncoding.EncodeToString(sum[:])[:16]
}
