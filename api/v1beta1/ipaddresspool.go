package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// IPAddressPool is a set of addresses that Services of type LoadBalancer can get.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,shortName=ippool,categories=landfall
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Auto",type=boolean,JSONPath=`.spec.autoAssign`
// +kubebuilder:printcolumn:name="Assigned4",type=string,JSONPath=`.status.assignedIPv4`
// +kubebuilder:printcolumn:name="Free4",type=string,JSONPath=`.status.availableIPv4`
// +kubebuilder:printcolumn:name="Assigned6",type=string,JSONPath=`.status.assignedIPv6`
// +kubebuilder:printcolumn:name="Free6",type=string,JSONPath=`.status.availableIPv6`
// +kubebuilder:printcolumn:name="Exhausted",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Exhausted")].status`
// +kubebuilder:printcolumn:name="Overlapping",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Overlapping")].status`
// +kubebuilder:printcolumn:name="Addresses",type=string,priority=1,JSONPath=`.spec.addresses`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type IPAddressPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec IPAddressPoolSpec `json:"spec"`
	// +optional
	Status IPAddressPoolStatus `json:"status,omitzero"`
}

// IPAddressPoolSpec says which addresses the pool holds and who gets them.
//
// The rule looks at CIDRs only, of which two are apart unless one contains the other: CEL has no
// order of addresses for ranges. It is left out where it would cost more than the API server allows
// one call.
//
// +kubebuilder:validation:XValidation:rule="!has(self.reservations) || self.addresses.size() * self.reservations.size() > 8192 || self.addresses.exists(a, !isCIDR(a.trim())) || [self.addresses.map(a, cidr(a.trim()))].all(pool, self.reservations.filter(r, isCIDR(r.addresses.trim())).map(r, cidr(r.addresses.trim())).all(c, pool.exists(a, a.containsCIDR(c) || c.containsCIDR(a))))",message="each reservation must have addresses of spec.addresses: one is wholly outside of them",fieldPath=".reservations"
type IPAddressPoolSpec struct {
	// addresses lists what the pool holds: CIDRs (192.0.2.0/28, 2001:db8::/120) and ranges
	// (192.0.2.10-192.0.2.20), of both families if wanted. A range must end at or after its start,
	// with both ends of one family.
	//
	// +required
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Addresses []AddressRange `json:"addresses"`

	// autoAssign set to false keeps the pool for Services that ask for it or for one of its addresses.
	//
	// +optional
	// +kubebuilder:default=true
	AutoAssign *bool `json:"autoAssign,omitempty"`

	// excludedAddresses are never handed out, in the form of addresses. Whoever holds one keeps it.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	ExcludedAddresses []AddressRange `json:"excludedAddresses,omitempty"`

	// avoidBuggyIPs excludes IPv4 addresses that end in .0 or .255, which some old devices take for
	// those of networks.
	//
	// +optional
	AvoidBuggyIPs bool `json:"avoidBuggyIPs,omitempty"`

	// serviceAllocation restricts the pool to some Services and has them served from it before they
	// are from pools without it.
	//
	// +optional
	ServiceAllocation *ServiceAllocation `json:"serviceAllocation,omitempty"`

	// addressesPerNamespace limits how many addresses of one family the Services of one namespace hold
	// of this pool. No limit if unset.
	//
	// +optional
	// +kubebuilder:validation:Minimum=1
	AddressesPerNamespace int32 `json:"addressesPerNamespace,omitempty"`

	// reservations keep addresses of the pool for a Service, or for those of a namespace, whether or
	// not it exists.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Reservations []Reservation `json:"reservations,omitempty"`

	// quarantine is how long a freed address is kept for the Service that held it: if that is created
	// again within this time it gets the address back, and until then no stranger meets its clients.
	// 0s for not at all, forever for ever.
	//
	// +optional
	// +kubebuilder:default="60s"
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="self.matches('^(forever|([0-9]+(h|m|s))+)$')",message="must be a time such as 60s or 24h, or forever"
	Quarantine string `json:"quarantine,omitempty"`
}

// ServiceAllocation selects Services: those in one of the namespaces that also match one of
// serviceSelectors.
type ServiceAllocation struct {
	// priority orders the pools that may serve a Service: the lowest first, and 0 or unset last. Among
	// equals the oldest pool comes first.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	Priority int32 `json:"priority,omitempty"`
	// namespaces are names; together with namespaceSelectors, every namespace if both are empty.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Namespaces []string `json:"namespaces,omitempty"`
	// namespaceSelectors are alternatives: labels of namespaces.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NamespaceSelectors []metav1.LabelSelector `json:"namespaceSelectors,omitempty"`
	// serviceSelectors are alternatives: labels of Services. Every Service if empty.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	ServiceSelectors []metav1.LabelSelector `json:"serviceSelectors,omitempty"`
}

// Reservation keeps addresses for a Service, or for those of a namespace.
type Reservation struct {
	// addresses is one address with its prefix length, a CIDR or a range.
	//
	// +required
	Addresses AddressRange `json:"addresses"`
	// namespace of the Services that may have the addresses.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// name of the Service that may have the addresses; any in the namespace if empty.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`
}

// AddressRange is a CIDR or a range from-to of one address family.
//
// The last rule compares two addresses with what CEL has, within the API server's cost limits: h is
// the last of every 16 bits up to which the two share a network, and of the 16 bits from there one,
// n = h+i, is the first in which they differ: the network of n bits (x) contains both and that of
// n+1 bits (y) only the start. The start is the lower one if it has a 0 there, that is, if x and y
// begin at the same address. Prefix lengths are put together from two tables of digits, as the
// limits count string(n) as unbounded.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=95
// +kubebuilder:validation:XValidation:rule="self.contains('-') || isCIDR(self.trim())",message="must be a CIDR such as 192.0.2.0/28 (192.0.2.1/32 for a single address) or a range such as 192.0.2.10-192.0.2.20"
// +kubebuilder:validation:XValidation:rule="!self.contains('-') || (isIP(self.substring(0,self.indexOf('-')).trim()) && isIP(self.substring(self.indexOf('-')+1).trim()))",message="both ends of a range must be IP addresses, as in 192.0.2.10-192.0.2.20"
// +kubebuilder:validation:XValidation:rule="!self.contains('-') || !(isIP(self.substring(0,self.indexOf('-')).trim()) && isIP(self.substring(self.indexOf('-')+1).trim())) || ip(self.substring(0,self.indexOf('-')).trim()).family() == ip(self.substring(self.indexOf('-')+1).trim()).family()",message="both ends of a range must be of the same address family"
// +kubebuilder:validation:XValidation:rule="!self.contains('-') || !(isIP(self.substring(0,self.indexOf('-')).trim()) && isIP(self.substring(self.indexOf('-')+1).trim())) || !(ip(self.substring(0,self.indexOf('-')).trim()).family() == ip(self.substring(self.indexOf('-')+1).trim()).family()) || ip(self.substring(0,self.indexOf('-')).trim()) == ip(self.substring(self.indexOf('-')+1).trim()) || [ip(self.substring(self.indexOf('-')+1).trim())].exists(to, [ip(self.substring(0,self.indexOf('-')).trim()).family() == 4 ? (cidr(self.substring(0,self.indexOf('-')).trim() + '/16').containsIP(to) ? 16 : 0) : (cidr(self.substring(0,self.indexOf('-')).trim() + '/112').containsIP(to) ? 112 : cidr(self.substring(0,self.indexOf('-')).trim() + '/96').containsIP(to) ? 96 : cidr(self.substring(0,self.indexOf('-')).trim() + '/80').containsIP(to) ? 80 : cidr(self.substring(0,self.indexOf('-')).trim() + '/64').containsIP(to) ? 64 : cidr(self.substring(0,self.indexOf('-')).trim() + '/48').containsIP(to) ? 48 : cidr(self.substring(0,self.indexOf('-')).trim() + '/32').containsIP(to) ? 32 : cidr(self.substring(0,self.indexOf('-')).trim() + '/16').containsIP(to) ? 16 : 0)].exists(h, [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15].exists(i, [cidr(self.substring(0,self.indexOf('-')).trim() + '/  /1 /2 /3 /4 /5 /6 /7 /8 /9 /10/11/12'.substring((h+i)/10*3, (h+i)/10*3+3).trim() + '0123456789'.substring((h+i)%10, (h+i)%10+1))].exists(x, [cidr(self.substring(0,self.indexOf('-')).trim() + '/  /1 /2 /3 /4 /5 /6 /7 /8 /9 /10/11/12'.substring((h+i+1)/10*3, (h+i+1)/10*3+3).trim() + '0123456789'.substring((h+i+1)%10, (h+i+1)%10+1))].exists(y, x.containsIP(to) && !y.containsIP(to) && x.masked().ip() == y.masked().ip())))))",message="a range must end at or after its start: swap the two addresses"
type AddressRange string

// IPAddressPoolStatus counts the pool's addresses and says whether it hands them out. Counts are
// decimal strings, as an IPv6 range can hold more addresses than an int64.
type IPAddressPoolStatus struct {
	// assignedIPv4 counts the IPv4 addresses that Services hold.
	// +optional
	AssignedIPv4 string `json:"assignedIPv4,omitempty"`
	// assignedIPv6 counts the IPv6 addresses that Services hold.
	// +optional
	AssignedIPv6 string `json:"assignedIPv6,omitempty"`
	// availableIPv4 counts the IPv4 addresses that can be handed out to anybody now: not held, kept,
	// reserved or excluded.
	// +optional
	AvailableIPv4 string `json:"availableIPv4,omitempty"`
	// availableIPv6 counts the IPv6 addresses that can be handed out to anybody now.
	// +optional
	AvailableIPv6 string `json:"availableIPv6,omitempty"`
	// released are freed addresses that spec.quarantine keeps for the Services that held them; the
	// newest 1,000.
	// +optional
	// +listType=atomic
	Released []ReleasedAddress `json:"released,omitempty"`
	// claims are addresses on their way to Services: what a controller writes here before it writes
	// the Service, so that no other controller, were there one at the same time, gives them away.
	// +optional
	// +listType=atomic
	Claims []AddressClaim `json:"claims,omitempty"`
	// writer is the controller that claimed addresses last.
	// +optional
	Writer string `json:"writer,omitempty"`
	// conditions: Ready says whether the pool hands out addresses, Overlapping whether it shares some
	// with another pool, and Exhausted whether it has none left of a family.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ReleasedAddress is a freed address that is kept for the Service that held it.
type ReleasedAddress struct {
	Address   string `json:"address"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// at is when it was freed.
	At metav1.Time `json:"at"`
}

// AddressClaim are addresses on their way to a Service, decided on one version of it and void for
// any other.
type AddressClaim struct {
	Namespace       string   `json:"namespace"`
	Name            string   `json:"name"`
	UID             string   `json:"uid"`
	ResourceVersion string   `json:"resourceVersion"`
	Addresses       []string `json:"addresses"`
}

// IPAddressPoolList is a list of pools.
//
// +kubebuilder:object:root=true
type IPAddressPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []IPAddressPool `json:"items"`
}
