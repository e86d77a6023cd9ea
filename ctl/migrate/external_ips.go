package migrate

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// maxNamed is how many Services, or namespaces, a note names.
const maxNamed = 5

// NoteExternalIPs notes which Services list external IPs that Landfall does not serve as kube-proxy does: addresses of
// Nodes, which no node serves, and all others, as the API does not show what the interfaces of a node have.
func (k *KubeProxy) NoteExternalIPs(services, nodes []Object) {
	owners := map[netip.Addr]string{}
	for _, node := range nodes {
		for _, addr := range nodeAddresses(node) {
			owners[addr] = node.Metadata.Name
		}
	}
	var ofNodes, others []string
	for _, s := range services {
		var theirs, rest []string
		for _, addr := range externalIPs(s) {
			if node, ok := owners[addr]; ok {
				theirs = append(theirs, fmt.Sprintf("%s (Node %s)", addr, node))
			} else {
				rest = append(rest, addr.String())
			}
		}
		about := func(addrs []string) string {
			return s.Metadata.Namespace + "/" + s.Metadata.Name + " " + atMostNamed(addrs, " ")
		}
		if len(theirs) > 0 {
			ofNodes = append(ofNodes, about(theirs))
		}
		if len(rest) > 0 {
			others = append(others, about(rest))
		}
	}
	if len(ofNodes) > 0 {
		k.note("Landfall serves no external IP that is an address of a Node: %s. List what is to be served in "+
			"proxy.externalIPs, as CIDRs, with all other external IPs in use: it serves no others then", named(ofNodes))
	}
	if len(others) > 0 {
		k.note("a node does not serve an external IP that is an address of one of its interfaces, which the API does not "+
			"show: %s. Look for them in ip address on each node. Give an address that a program has put there for the "+
			"Service the prefix length 32 (IPv6: 128), or list it in proxy.externalIPs", named(others))
	}
}

// named lists the first Services by name.
func named(services []string) string {
	slices.Sort(services)
	return atMostNamed(services, "; ")
}

// atMostNamed joins the first maxNamed of all, and says how many more there are.
func atMostNamed(all []string, separator string) string {
	text := strings.Join(all[:min(maxNamed, len(all))], separator)
	if more := len(all) - maxNamed; more > 0 {
		text += fmt.Sprintf("%sand %d more", separator, more)
	}
	return text
}

// externalIPs returns the external IPs of a Service. One of type ExternalName has none.
func externalIPs(service Object) (addrs []netip.Addr) {
	if service.Spec["type"] == "ExternalName" {
		return nil
	}
	list, _ := service.Spec["externalIPs"].([]any)
	for _, one := range list {
		text, _ := one.(string)
		if addr, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs
}

// nodeAddresses returns the addresses in the status of a Node.
func nodeAddresses(node Object) (addrs []netip.Addr) {
	list, _ := node.Status["addresses"].([]any)
	for _, one := range list {
		kind, _ := dig(one, "type").(string)
		text, _ := dig(one, "address").(string)
		addr, err := netip.ParseAddr(text)
		if err == nil && (kind == "InternalIP" || kind == "ExternalIP") {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs
}
