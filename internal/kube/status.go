package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Status writes the parts of Services' and pools' statuses that Landfall owns, and nothing else of
// them. It is safe for concurrent use.
type Status struct {
	core     kinds
	landfall rest.Interface
	now      func() time.Time

	mu   sync.Mutex
	last *v1beta1.IPAddressPool // as our last write of a pool has made it; nil while it is written
}

// Status returns a writer; now is the clock for transition times.
func (c *Client) Status(now func() time.Time) *Status {
	return &Status{core: c.core, landfall: c.landfall, now: now}
}

// Holding is what a Service shall show of its addresses.
type Holding struct {
	// Addresses are all that the Service holds, in the order in which they are shown. If there are
	// none, the writer also removes the annotation that names the announcing nodes.
	Addresses []netip.Addr
	// Mode is the ipMode of the addresses; "" leaves that of an address as it is.
	Mode lb.IPMode
	// Condition is set on the Service; nil takes all of Landfall's conditions away.
	Condition *lb.Condition
	// Pool is written as lb.AnnotationAllocatedFrom along with other changes; "" leaves it. Without
	// any address the annotation goes.
	Pool string
	// Finalizer says what to do with lb.FinalizerCleanup.
	Finalizer FinalizerChange
}

// FinalizerChange is what to do with a finalizer.
type FinalizerChange int

// What to do with a finalizer: leave it as it is, set it, or remove it.
const (
	FinalizerStays FinalizerChange = iota
	FinalizerSet
	FinalizerRemoved
)

// shownBy reports whether there is nothing to do.
func (f FinalizerChange) shownBy(service lb.Service) bool {
	return f == FinalizerStays || service.Finalizer == (f == FinalizerSet)
}

// Shows reports whether the Service shows h already, so that there is nothing to write.
func (h Holding) Shows(service lb.Service) bool {
	if !h.showsAddresses(service) || h.leavesAnnotations(service) || !h.Finalizer.shownBy(service) {
		return false
	}
	if h.Condition == nil {
		return len(service.Conditions) == 0
	}
	return hasCondition(service.Conditions, *h.Condition)
}

func (h Holding) showsAddresses(service lb.Service) bool {
	return service.Unread == 0 && slices.Equal(h.Addresses, ingressAddresses(service.Ingress)) &&
		!slices.ContainsFunc(service.Ingress, func(in lb.Ingress) bool { return h.Mode != "" && in.Mode != h.Mode })
}

// leavesAnnotations reports whether the Service says who announces it, or of which pool it is,
// although it shall hold no address.
func (h Holding) leavesAnnotations(service lb.Service) bool {
	return len(h.Addresses) == 0 && (service.Announcements != "" || len(service.AllocatedFrom) > 0)
}

// annotate adds what h changes of the annotations.
func (h Holding) annotate(service lb.Service, m *patchedMetadata) {
	if len(h.Addresses) == 0 && service.Announcements != "" {
		m.annotate(lb.AnnotationAnnouncements, "")
	}
	if _, ok := service.AllocatedFrom[lb.AnnotationAllocatedFrom]; !ok && h.Pool != "" && len(h.Addresses) > 0 {
		m.annotate(lb.AnnotationAllocatedFrom, h.Pool)
	}
	for name, pool := range service.AllocatedFrom {
		switch {
		case len(h.Addresses) == 0:
			m.annotate(name, "")
		case h.Pool != "" && h.Pool != pool:
			m.annotate(name, h.Pool)
		}
	}
}

// Hold writes h into the Service's status. It fails with a conflict (see IsConflict) if the Service
// has changed since service was read, so that no holding is ever decided on what is no longer so.
func (s *Status) Hold(ctx context.Context, service lb.Service, h Holding) error {
	patch := statusPatch{Metadata: patchedMetadata{ResourceVersion: service.Version}}
	if !h.showsAddresses(service) {
		patch.Status.LoadBalancer = ingressPatch(service.Ingress, h)
	}
	h.annotate(service, &patch.Metadata)
	if !h.Finalizer.shownBy(service) {
		patch.Metadata.finalize(h.Finalizer)
	}
	if h.Condition != nil {
		patch.Status.Conditions = []any{s.conditionPatch(service.Conditions, *h.Condition)}
	} else {
		for _, c := range service.Conditions {
			patch.Status.Conditions = append(patch.Status.Conditions, removedCondition(c.Type))
		}
	}
	return s.patchService(ctx, service, patch)
}

// List writes since when a Service lists its external IPs; nil takes it away. It does not fail if the Service
// has changed since it was read: who changes it all the time would keep it from being written.
func (s *Status) List(ctx context.Context, service lb.Service, listed lb.Listing) error {
	written := removedCondition(lb.ConditionExternalIPs)
	if listed != nil {
		// The time goes along each time: without it, the API server refuses a condition that somebody has removed.
		now := metav1.NewTime(s.now())
		written = patchedCondition{Type: lb.ConditionExternalIPs, Status: metav1.ConditionTrue, Reason: lb.ReasonListed,
			Message: listed.String(), LastTransitionTime: &now}
	}
	return s.patchService(ctx, service, statusPatch{Status: patchedStatus{Conditions: []any{written}}})
}

// Pool writes the status of a pool as Landfall owns it; conditions of other types are kept. It
// fails with a conflict if the pool has changed since pool was read, which is an ErrWentBack too if
// the API server has an older one, and returns the version that the write has made.
func (s *Status) Pool(ctx context.Context, pool lb.Pool, status lb.PoolStatus) (version string, err error) {
	o := s.takeLast(pool)
	known := o != nil
	if !known {
		if o, err = s.readPool(ctx, pool); err != nil {
			return "", err
		}
	}
	o.Status.AssignedIPv4, o.Status.AvailableIPv4 = status.AssignedIPv4, status.AvailableIPv4
	o.Status.AssignedIPv6, o.Status.AvailableIPv6 = status.AssignedIPv6, status.AvailableIPv6
	o.Status.QuarantinedIPv4, o.Status.QuarantinedIPv6 = status.QuarantinedIPv4, status.QuarantinedIPv6
	o.Status.Released, o.Status.Claims, o.Status.Next, o.Status.Writer = nil, nil, nil, status.Writer
	for _, r := range status.Next {
		o.Status.Next = append(o.Status.Next, r.From.String()+"-"+r.To.String())
	}
	for _, r := range status.Released {
		o.Status.Released = append(o.Status.Released, v1beta1.ReleasedAddress{
			Address: r.Addr.String(), Namespace: r.Service.Namespace, Name: r.Service.Name, At: metav1.NewTime(r.At),
		})
	}
	for _, c := range status.Pending {
		claim := v1beta1.AddressClaim{Namespace: c.Service.Namespace, Name: c.Service.Name, UID: c.UID,
			ResourceVersion: c.Version}
		for _, addr := range c.Addresses {
			claim.Addresses = append(claim.Addresses, addr.String())
		}
		o.Status.Claims = append(o.Status.Claims, claim)
	}
	for _, c := range status.Conditions {
		meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{
			Type: c.Type, Status: conditionStatus(c.Status), Reason: string(c.Reason), Message: c.Message,
			ObservedGeneration: c.Generation, LastTransitionTime: metav1.NewTime(s.now()),
		})
	}
	var written v1beta1.IPAddressPool
	err = s.landfall.Put().Resource("ipaddresspools").Name(pool.Name).SubResource("status").Body(o).Do(ctx).Into(&written)
	if known && apierrors.IsConflict(err) {
		if _, why := s.readPool(ctx, pool); why != nil {
			return "", why
		}
	}
	if err != nil {
		return "", fmt.Errorf("write status of pool %s: %w", pool.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = &written
	return written.ResourceVersion, nil
}

// takeLast returns a pool as our last write has made it; nil if that is not the version that was read.
func (s *Status) takeLast(pool lb.Pool) *v1beta1.IPAddressPool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.last
	if last == nil || last.Name != pool.Name || last.ResourceVersion != pool.Version {
		return nil
	}
	s.last = nil
	return last
}

// readPool reads a pool, and fails with a conflict if it has changed since.
func (s *Status) readPool(ctx context.Context, pool lb.Pool) (*v1beta1.IPAddressPool, error) {
	var o v1beta1.IPAddressPool
	if err := s.landfall.Get().Resource("ipaddresspools").Name(pool.Name).Do(ctx).Into(&o); err != nil {
		return nil, fmt.Errorf("read pool %s: %w", pool.Name, err)
	}
	if o.ResourceVersion == pool.Version {
		return &o, nil
	}
	conflict := apierrors.NewConflict(v1beta1.GroupVersion.WithResource("ipaddresspools").GroupResource(), pool.Name,
		errors.New("it has changed since it was read"))
	if Older(o.ResourceVersion, pool.Version) {
		return nil, fmt.Errorf("%w: %w", ErrWentBack, conflict)
	}
	return nil, conflict
}

// ErrWentBack is a conflict with an object older than one that was there before: etcd was restored
// from a snapshot.
var ErrWentBack = errors.New("the API server holds an older state than before")

// IsConflict reports whether a write failed because the object has changed, or was created anew, since it was read,
// or, where the write names no version but the UID, because it is gone.
func IsConflict(err error) bool { return apierrors.IsConflict(err) && !notAdmitted(err) }

// IsUnwritable reports whether the API server refused a write because of the object that would have come of it,
// as one with too many annotations or one that is too large, or because admission did: a webhook, which may also
// be out of reach, or a policy. The write has not taken place.
func IsUnwritable(err error) bool {
	return notAdmitted(err) || apierrors.IsInvalid(err) && !createdAnew(err) ||
		apierrors.IsRequestEntityTooLargeError(err) ||
		err != nil && strings.Contains(err.Error(), "etcdserver: request is too large")
}

// IsNotFound reports whether a write failed because the object is gone, also if there is another one of its name.
func IsNotFound(err error) bool {
	return (apierrors.IsNotFound(err) || createdAnew(err)) && !notAdmitted(err)
}

// notAdmitted reports whether admission refused a write, which it does before anything is stored. A webhook answers
// with a code, a reason and causes of its choice, those of a conflict included: only the API server's words tell.
func notAdmitted(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	message := status.Status().Message
	return strings.HasPrefix(message, "admission webhook ") && strings.Contains(message, " denied the request") ||
		strings.Contains(message, "failed calling webhook ") ||
		strings.Contains(message, "ValidatingAdmissionPolicy ") && strings.Contains(message, " denied request")
}

// createdAnew reports whether a patch failed because it names the UID of an object that was there before. Without
// a version in the patch, it is a change of a field that cannot change.
func createdAnew(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes,
		func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// statusPatch is a strategic merge patch of a Service or a pod: conditions merge by type, everything that is
// not named stays.
type statusPatch struct {
	Metadata patchedMetadata `json:"metadata"`
	Status   patchedStatus   `json:"status"`
}

type patchedMetadata struct {
	UID             string             `json:"uid,omitempty"`
	ResourceVersion string             `json:"resourceVersion,omitempty"`
	Annotations     map[string]*string `json:"annotations,omitempty"` // nil removes one
	// Of these lists an API server adds and removes what they have.
	Finalizers        []string `json:"finalizers,omitempty"`
	RemovedFinalizers []string `json:"$deleteFromPrimitiveList/finalizers,omitempty"`
}

// annotate sets an annotation, or with "" removes it.
func (m *patchedMetadata) annotate(name, value string) {
	if m.Annotations == nil {
		m.Annotations = map[string]*string{}
	}
	m.Annotations[name] = nil
	if value != "" {
		m.Annotations[name] = &value
	}
}

func (m *patchedMetadata) finalize(change FinalizerChange) {
	if list := []string{lb.FinalizerCleanup}; change == FinalizerSet {
		m.Finalizers = list
	} else {
		m.RemovedFinalizers = list
	}
}

type patchedStatus struct {
	LoadBalancer *patchedLoadBalancer `json:"loadBalancer,omitempty"`
	Conditions   []any                `json:"conditions,omitempty"`
}

// patchedLoadBalancer replaces the list of addresses; null removes it.
type patchedLoadBalancer struct {
	Ingress []patchedIngress `json:"ingress"`
}

type patchedIngress struct {
	IP     netip.Addr `json:"ip"`
	IPMode lb.IPMode  `json:"ipMode,omitempty"`
}

type patchedCondition struct {
	Type    string                 `json:"type"`
	Status  metav1.ConditionStatus `json:"status"`
	Reason  lb.Reason              `json:"reason"`
	Message string                 `json:"message"`
	// ObservedGeneration and LastTransitionTime stay as they are when left out.
	ObservedGeneration int64        `json:"observedGeneration,omitempty"`
	LastTransitionTime *metav1.Time `json:"lastTransitionTime,omitempty"`
}

func removedCondition(conditionType string) any {
	return map[string]string{"$patch": "delete", "type": conditionType}
}

// conditionPatch names the transition time only if the status changes from what is there.
func (s *Status) conditionPatch(have []lb.Condition, c lb.Condition) any {
	patch := patchedCondition{
		Type: c.Type, Status: conditionStatus(c.Status), Reason: c.Reason, Message: c.Message,
		ObservedGeneration: c.Generation,
	}
	same := slices.ContainsFunc(have, func(h lb.Condition) bool { return h.Type == c.Type && h.Status == c.Status })
	if !same {
		now := metav1.NewTime(s.now())
		patch.LastTransitionTime = &now
	}
	return patch
}

// ingressPatch keeps the mode of an address that was there before, unless h says one.
func ingressPatch(have []lb.Ingress, h Holding) *patchedLoadBalancer {
	var patch patchedLoadBalancer
	for _, addr := range h.Addresses {
		in := patchedIngress{IP: addr, IPMode: h.Mode}
		if i := slices.IndexFunc(have, func(was lb.Ingress) bool { return was.Addr == addr }); i >= 0 && in.IPMode == "" {
			in.IPMode = have[i].Mode
		}
		patch.Ingress = append(patch.Ingress, in)
	}
	return &patch
}

func (s *Status) patchService(ctx context.Context, service lb.Service, patch statusPatch) error {
	patch.Metadata.UID = service.UID
	body, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encode status of Service %s: %w", service.Key, err)
	}
	_, err = s.core.Services(service.Key.Namespace).Patch(ctx, service.Key.Name, types.StrategicMergePatchType,
		body,
		metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("write status of Service %s: %w", service.Key, err)
	}
	return nil
}

func hasCondition(have []lb.Condition, c lb.Condition) bool { return slices.Contains(have, c) }

func conditionStatus(status bool) metav1.ConditionStatus {
	if status {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

func ingressAddresses(ingress []lb.Ingress) []netip.Addr {
	var addrs []netip.Addr
	for _, in := range ingress {
		addrs = append(addrs, in.Addr)
	}
	return addrs
}
