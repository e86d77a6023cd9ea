package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// IPAddressPool holds addresses that the controller assigns to Services of type LoadBalancer.
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

// The rule compares only CIDRs, as ordering the addresses of ranges would cost too much here: two CIDRs are disjoint
// unless one contains the other. The rule passes where the comparison would cost more than the API server allows for
// one call.

// IPAddressPoolSpec lists the addresses of the pool and the Services that may have them.
//
// +kubebuilder:validation:XValidation:rule="!has(self.reservations) || self.addresses.size() * self.reservations.size() > 8192 || self.addresses.exists(a, !isCIDR(a.trim())) || [self.addresses.map(a, cidr(a.trim()))].all(pool, self.reservations.filter(r, isCIDR(r.addresses.trim())).map(r, cidr(r.addresses.trim())).all(c, pool.exists(a, a.containsCIDR(c) || c.containsCIDR(a))))",message="each reservation must have addresses of spec.addresses: one lies wholly outside; change it, or add its addresses to the pool",fieldPath=".reservations"
type IPAddressPoolSpec struct {
	// addresses are the CIDRs (192.0.2.0/28, 2001:db8::/120) and ranges (192.0.2.10-192.0.2.20) of
	// the pool, IPv4 or IPv6 or both. Both ends of a range have one address family, and the end is
	// not before the start.
	//
	// +required
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Addresses []AddressRange `json:"addresses"`

	// autoAssign allows the controller to assign addresses of this pool to any Service. Set it to
	// false to keep the pool for Services that request it, or one of its addresses, by annotation.
	//
	// +optional
	// +kubebuilder:default=true
	AutoAssign *bool `json:"autoAssign,omitempty"`

	// excludedAddresses are addresses of the pool that the controller never assigns, written like
	// addresses. A Service that already holds one keeps it.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	ExcludedAddresses []AddressRange `json:"excludedAddresses,omitempty"`

	// avoidBuggyIPs excludes IPv4 addresses that end in .0 or .255. Set it if clients include old
	// devices that treat these as network or broadcast addresses.
	//
	// +optional
	AvoidBuggyIPs bool `json:"avoidBuggyIPs,omitempty"`

	// serviceAllocation restricts the pool to the Services that it selects. These Services get
	// addresses from this pool before the controller tries pools without serviceAllocation.
	//
	// +optional
	ServiceAllocation *ServiceAllocation `json:"serviceAllocation,omitempty"`

	// addressesPerNamespace is a quota: the most addresses of one family that the Services of one
	// namespace hold from this pool. An address that several Services share counts once. Unset
	// means no limit.
	//
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=2147483647
	AddressesPerNamespace int32 `json:"addressesPerNamespace,omitempty"`

	// sharing says which Services may share an address of this pool if they have the same sharing
	// key: those of one namespace, or with cluster those of all namespaces, where everybody who
	// guesses the key can join. Services that already share an address continue to do so.
	//
	// +optional
	// +kubebuilder:default=namespace
	// +kubebuilder:validation:Enum=namespace;cluster
	Sharing string `json:"sharing,omitempty"`

	// reservations keep addresses of the pool for one Service, or for the Services of one
	// namespace, before and after these exist.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Reservations []Reservation `json:"reservations,omitempty"`

	// quarantine is how long a freed address stays reserved for the Service that held it: a duration
	// such as 60s or 24h, forever, or 0s for not at all. A Service created again with the same name
	// within this time gets its address back; no other Service receives traffic of clients that still
	// use the old address.
	//
	// +optional
	// +kubebuilder:default="60s"
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="self.matches('^(forever|([0-9]+(h|m|s))+)$')",message="must be a time such as 60s or 24h, or forever"
	Quarantine string `json:"quarantine,omitempty"`

	// probeAhead is how many of the next free addresses of each family the speakers probe before a
	// Service gets them, every 30 s, where an L2Advertisement selects the pool. They probe the IPv4
	// addresses after those too, up to the 512th, every 10 minutes. A Service that gets such an address
	// answers at once; any other new address is probed first, which takes 0.6 s. 0 probes none ahead.
	//
	// +optional
	// +kubebuilder:default=16
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=512
	ProbeAhead *int32 `json:"probeAhead,omitempty"`
}

// ServiceAllocation selects Services: those that are in one of the namespaces and also match one of
// serviceSelectors.
type ServiceAllocation struct {
	// priority orders the pools that select a Service: the controller tries the lowest number
	// first, and 0 or unset last. Among equal numbers the oldest pool comes first.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	Priority int32 `json:"priority,omitempty"`
	// namespaces selects namespaces by name, in addition to namespaceSelectors. If both are empty,
	// every namespace is selected.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Namespaces []string `json:"namespaces,omitempty"`
	// namespaceSelectors selects namespaces by label; a namespace needs to match only one selector.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NamespaceSelectors []metav1.LabelSelector `json:"namespaceSelectors,omitempty"`
	// serviceSelectors selects Services by label; a Service needs to match only one selector. If
	// empty, every Service is selected.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	ServiceSelectors []metav1.LabelSelector `json:"serviceSelectors,omitempty"`
}

// Reservation keeps addresses for one Service, or for the Services of one namespace.
type Reservation struct {
	// addresses is a CIDR or a range; a single address has the prefix length /32 or /128.
	//
	// +required
	Addresses AddressRange `json:"addresses"`
	// namespace is the namespace of the Services that may have the addresses.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// name is the Service that may have the addresses. If empty, any Service of the namespace may
	// have them.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`
}

// The last rule compares two addresses with what CEL has, within the API server's cost limits: h is
// the last of every 16 bits up to which the two share a network, and of the 16 bits from there one,
// n = h+i, is the first in which they differ: the network of n bits (x) contains both and that of
// n+1 bits (y) only the start. The start is the lower one if it has a 0 there, that is, if x and y
// begin at the same address. Prefix lengths are put together from two tables of digits, as the
// limits count string(n) as unbounded.

// AddressRange is a CIDR, or a range FROM-TO, of one address family. A single address is a CIDR such as 192.0.2.1/32.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=95
// +kubebuilder:validation:XValidation:rule="self.contains('-') || isCIDR(self.trim())",message="must be a CIDR such as 192.0.2.0/28 (192.0.2.1/32 for a single address) or a range such as 192.0.2.10-192.0.2.20"
// +kubebuilder:validation:XValidation:rule="!self.contains('-') || (isIP(self.substring(0,self.indexOf('-')).trim()) && isIP(self.substring(self.indexOf('-')+1).trim()))",message="both ends of a range must be IP addresses, as in 192.0.2.10-192.0.2.20"
// +kubebuilder:validation:XValidation:rule="!self.contains('-') || !(isIP(self.substring(0,self.indexOf('-')).trim()) && isIP(self.substring(self.indexOf('-')+1).trim())) || ip(self.substring(0,self.indexOf('-')).trim()).family() == ip(self.substring(self.indexOf('-')+1).trim()).family()",message="both ends of a range must be of the same address family"
// +kubebuilder:validation:XValidation:rule="!self.contains('-') || !(isIP(self.substring(0,self.indexOf('-')).trim()) && isIP(self.substring(self.indexOf('-')+1).trim())) || !(ip(self.substring(0,self.indexOf('-')).trim()).family() == ip(self.substring(self.indexOf('-')+1).trim()).family()) || ip(self.substring(0,self.indexOf('-')).trim()) == ip(self.substring(self.indexOf('-')+1).trim()) || [ip(self.substring(self.indexOf('-')+1).trim())].exists(to, [ip(self.substring(0,self.indexOf('-')).trim()).family() == 4 ? (cidr(self.substring(0,self.indexOf('-')).trim() + '/16').containsIP(to) ? 16 : 0) : (cidr(self.substring(0,self.indexOf('-')).trim() + '/112').containsIP(to) ? 112 : cidr(self.substring(0,self.indexOf('-')).trim() + '/96').containsIP(to) ? 96 : cidr(self.substring(0,self.indexOf('-')).trim() + '/80').containsIP(to) ? 80 : cidr(self.substring(0,self.indexOf('-')).trim() + '/64').containsIP(to) ? 64 : cidr(self.substring(0,self.indexOf('-')).trim() + '/48').containsIP(to) ? 48 : cidr(self.substring(0,self.indexOf('-')).trim() + '/32').containsIP(to) ? 32 : cidr(self.substring(0,self.indexOf('-')).trim() + '/16').containsIP(to) ? 16 : 0)].exists(h, [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15].exists(i, [cidr(self.substring(0,self.indexOf('-')).trim() + '/  /1 /2 /3 /4 /5 /6 /7 /8 /9 /10/11/12'.substring((h+i)/10*3, (h+i)/10*3+3).trim() + '0123456789'.substring((h+i)%10, (h+i)%10+1))].exists(x, [cidr(self.substring(0,self.indexOf('-')).trim() + '/  /1 /2 /3 /4 /5 /6 /7 /8 /9 /10/11/12'.substring((h+i+1)/10*3, (h+i+1)/10*3+3).trim() + '0123456789'.substring((h+i+1)%10, (h+i+1)%10+1))].exists(y, x.containsIP(to) && !y.containsIP(to) && x.masked().ip() == y.masked().ip())))))",message="a range must end at or after its start: swap the two addresses"
type AddressRange string

// IPAddressPoolStatus reports how many addresses are assigned and free, and whether the pool is
// usable. Counts are decimal strings, because an IPv6 range can hold more addresses than an int64
// can count.
type IPAddressPoolStatus struct {
	// assignedIPv4 is the number of IPv4 addresses that Services hold.
	// +optional
	AssignedIPv4 string `json:"assignedIPv4,omitempty"`
	// assignedIPv6 is the number of IPv6 addresses that Services hold.
	// +optional
	AssignedIPv6 string `json:"assignedIPv6,omitempty"`
	// availableIPv4 is the number of IPv4 addresses that any Service could get now: not held, in
	// quarantine, reserved or excluded.
	// +optional
	AvailableIPv4 string `json:"availableIPv4,omitempty"`
	// availableIPv6 is the number of IPv6 addresses that any Service could get now.
	// +optional
	AvailableIPv6 string `json:"availableIPv6,omitempty"`
	// quarantinedIPv4 is the number of freed IPv4 addresses in quarantine.
	// +optional
	QuarantinedIPv4 string `json:"quarantinedIPv4,omitempty"`
	// quarantinedIPv6 is the number of freed IPv6 addresses in quarantine.
	// +optional
	QuarantinedIPv6 string `json:"quarantinedIPv6,omitempty"`
	// released lists freed addresses in quarantine, each with the Service that held it: of many the
	// newest, up to 64 KiB.
	// +optional
	// +listType=atomic
	Released []ReleasedAddress `json:"released,omitempty"`
	// claims lists reservations in progress: the controller writes an address here before it writes
	// the Service, so that a second controller running at the same time does not assign the address
	// too. Up to 64 KiB, others follow once these are done.
	// +optional
	// +listType=atomic
	Claims []AddressClaim `json:"claims,omitempty"`
	// next lists the addresses that Services get next, as ranges in ascending order: 512 IPv4 addresses,
	// and as many IPv6 addresses as spec.probeAhead says. Speakers probe them ahead.
	// +optional
	// +listType=atomic
	Next []string `json:"next,omitempty"`
	// writer is the controller that last wrote claims.
	// +optional
	Writer string `json:"writer,omitempty"`
	// conditions are Ready (the pool assigns addresses), Overlapping (it shares addresses with
	// another pool) and Exhausted (no address of one family is free).
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ReleasedAddress is a freed address in quarantine, with the Service that held it.
type ReleasedAddress struct {
	// address is the freed address.
	Address string `json:"address"`
	// namespace is the namespace of the Service that held the address.
	Namespace string `json:"namespace"`
	// name is the name of that Service.
	Name string `json:"name"`
	// at is when the Service freed the address.
	At metav1.Time `json:"at"`
}

// AddressClaim is a reservation in progress: addresses for one Service. It is valid only for the
// given resourceVersion of the Service.
type AddressClaim struct {
	// namespace is the namespace of the Service.
	Namespace string `json:"namespace"`
	// name is the name of the Service.
	Name string `json:"name"`
	// uid is the uid of the Service.
	UID string `json:"uid"`
	// resourceVersion is the version of the Service for which the reservation is valid.
	ResourceVersion string `json:"resourceVersion"`
	// addresses are the reserved addresses.
	Addresses []string `json:"addresses"`
}

// IPAddressPoolList is a list of IPAddressPools.
//
// +kubebuilder:object:root=true
type IPAddressPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []IPAddressPool `json:"items"`
}
